"""Module sizes, device maps, and estimates of the memory that training needs."""
