"""Shared code of all strategies: messages to clients, checks of replies, merging."""
