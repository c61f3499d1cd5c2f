"""Secure aggregation: the server gets numbers of the clients and one weighted sum of updates.

A round has two exchanges. First the clients measure the numbers that the strategy weighs by, on the
received model; no array leaves them. The strategy's weights are told to each client, its own alone.
Then the clients train and send their updates masked by Flower's SecAgg+ protocol, so weighted.
`client` is a site's part, `rounds` the server's; `protocol` runs Flower's protocol, and `vectors`
has what is masked.
"""
