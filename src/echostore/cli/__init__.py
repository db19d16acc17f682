"""The command `echostore`."""
