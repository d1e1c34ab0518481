"""Shows where a training step's time goes: every operation is measured and compared with the machine's peak.

Not here: measuring the peak (measure/doctor/speed.py), and the step itself (core/train/step.py).
"""
