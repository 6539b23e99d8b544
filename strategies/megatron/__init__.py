"""Pipeline parallelism: ranks hold different layers of one model."""
