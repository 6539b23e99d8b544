"""Pipeline parallelism: the layers of one model are divided into stages over ranks."""
