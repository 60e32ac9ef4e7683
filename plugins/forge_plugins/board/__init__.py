"""`forge board`: runs in TensorBoard, on this machine."""
