"""Trainwright: a PyTorch training framework with two front doors, `Trainer` and `Accelerator`, over one engine.

Names are imported when they are first touched (PEP 562), so that `import trainwright` and the command line stay fast.
"""
