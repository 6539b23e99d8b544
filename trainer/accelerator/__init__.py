"""The Accelerator: the Trainer's strategies, loaders and precisions for people who keep their own loop."""
