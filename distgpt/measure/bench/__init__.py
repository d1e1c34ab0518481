"""`distgpt bench`: measurements that users repeat on their own machines, their result files and the report.

Not here: how processes are started (measure/jobs.py), PyTorch's side (measure/peer/), drawing (show/).
"""
