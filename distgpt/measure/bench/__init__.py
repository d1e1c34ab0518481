"""Measurements that users repeat on their own machines."""
