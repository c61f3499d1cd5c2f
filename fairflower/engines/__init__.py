"""Engines that run the clients of a simulation; all engines give the same bits."""
