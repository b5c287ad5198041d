"""What amp adds to an optimizer: masters, gradients of a pass, the step."""
