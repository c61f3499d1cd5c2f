"""A Flower app with a strategy of fairflower."""
