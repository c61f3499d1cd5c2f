"""Adapters of strategies and clients to Flower's classic ``Strategy`` and ``NumPyClient``."""
