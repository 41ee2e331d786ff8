"""Put the transaction of `argosy.Run` into trainers of other people: each adapter is a file, imported by its name."""

from argosy.train.adapters.transaction import Transaction

__all__ = ["Transaction"]
