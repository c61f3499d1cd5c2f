"""The tables of a report, as data for every output format."""
