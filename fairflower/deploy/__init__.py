"""A federation of real processes: certificates, keys, and a trial of it all on one machine."""
