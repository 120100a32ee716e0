"""Many chips: sharded modules, fused optimizers and the config swap."""
