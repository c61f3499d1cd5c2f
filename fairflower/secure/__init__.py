"""Secure aggregation: the server gets the clients' numbers and a weighted sum of updates.

A round has two exchanges. First, on the received model, the clients measure the numbers from which
the strategy computes weights; they send no arrays. The server sends each client only its own
weight. Then the clients train and send their weighted updates, masked by Flower's SecAgg+ protocol.
`client` contains the client's part and `rounds` the server's part; `protocol` runs Flower's
protocol, and `vectors` defines the vectors that are masked.
"""
