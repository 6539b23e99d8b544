"""Where the parts of a model go: sizes, device maps, and estimates of what a training needs."""
