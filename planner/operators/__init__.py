"""What each operator is: its loop nest, from which work, saved tensors, gradients and legal splits follow."""
