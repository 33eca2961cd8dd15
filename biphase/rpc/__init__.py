"""gRPC between biphase's processes: generated messages in `v1`, and the two ends' common plumbing."""
