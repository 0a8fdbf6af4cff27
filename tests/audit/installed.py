"""What an installed package may define: an object that counts, as a trainer's library has. It is loaded as if installed
(`worlds.install`)."""


class Box:
    """Holds a value, with a method that sets it."""

    def __init__(self, n):
        self.n = n

    def put(self, n):
        self.n = n
