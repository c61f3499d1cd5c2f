"""Deployments of real processes: certificates, keys, and a trial on this machine."""
