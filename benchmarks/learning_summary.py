def summarise(table, rows, curves, output, console):
    pass
