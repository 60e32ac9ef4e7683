"""What several built-in plugins share; other packages may use it too."""
