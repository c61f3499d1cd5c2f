"""Flower's classic API: strategies and clients for apps of ``Strategy`` and ``NumPyClient``."""
