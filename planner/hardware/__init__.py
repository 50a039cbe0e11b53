"""Devices, links, levels and mixed pools; what a transfer and a collective cost on them."""
