"""Secure aggregation: the server gets the clients' numbers and a weighted sum of updates.

A round has two exchanges. First the clients measure the numbers that the strategy weighs by, on the
received model; no array leaves them. The server tells each client only its own weight. Then the
clients train, and send their weighted updates, masked by Flower's SecAgg+ protocol. `client` has
the client's part and `rounds` the server's; `protocol` runs Flower's protocol, and `vectors`
defines what is masked.
"""
