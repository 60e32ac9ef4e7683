"""Clusters: strategies of many devices, jobs, and plans for them."""
