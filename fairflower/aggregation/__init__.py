"""Code shared by all strategies: messages to clients, checks of replies, merging."""
