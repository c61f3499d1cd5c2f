"""Tables of a user's own: what their columns mean, and how rows become features."""
