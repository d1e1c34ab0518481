"""Communicators: how the ranks of one job exchange arrays. A model never knows which one it runs under."""
