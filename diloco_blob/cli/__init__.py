"""The command line: `diloco-blob launch aggregate status verify export`."""
