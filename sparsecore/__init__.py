"""One chip: layouts, host preprocessing, ops, optimizers and backends."""
