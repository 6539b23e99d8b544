"""The tests; a package, so that processes which a test starts can import the test's own functions by name."""
