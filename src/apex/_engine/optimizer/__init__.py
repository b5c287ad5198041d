"""amp's part of an optimizer: masters, the gradients of a pass, the step."""
