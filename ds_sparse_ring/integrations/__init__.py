"""Where the package meets Transformers, its Trainer and DeepSpeed; one file each, named after what it talks to."""
