"""The energy of a run: counters that its hosts let it read, and the guard that sums them.

A run whose counters nobody may read does nothing here. Not here: power, temperatures, batteries.
"""
