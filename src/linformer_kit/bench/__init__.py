"""Our layers beside others: `peers` builds and checks them, `measure` takes time and memory, `table` keeps it, `plots` draws it."""
