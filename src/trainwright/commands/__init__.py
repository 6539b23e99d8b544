"""Commands as modules, under the names that Accelerate gives them."""
