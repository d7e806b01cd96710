"""Device meshes: tensor, context and pipeline parallelism, with replicas and shards around them."""
