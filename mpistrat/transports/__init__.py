"""How bytes move inside one group."""
