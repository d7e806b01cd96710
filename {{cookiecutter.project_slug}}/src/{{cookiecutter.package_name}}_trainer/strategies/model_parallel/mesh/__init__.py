"""Device meshes: tensor parallelism, with replicas and shards around it."""
