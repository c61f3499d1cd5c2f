"""Published data sets by name: read from folders or the Hub, embedded, or made of embedded ones."""
