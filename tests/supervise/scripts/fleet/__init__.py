"""A package, to be run with -m."""

print("package imported as", __name__, __package__)
