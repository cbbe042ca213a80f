"""What is computed: tensors, problems, and their names."""
