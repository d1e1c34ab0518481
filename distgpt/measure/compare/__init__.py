"""`distgpt bench stages`: the same job through every stage, its losses judged, its times in tables.

Not here: charts, pages and terminal tables as such (show/).
"""
