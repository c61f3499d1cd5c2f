"""Deployment: certificates, keys, and trial deployments on this machine."""
