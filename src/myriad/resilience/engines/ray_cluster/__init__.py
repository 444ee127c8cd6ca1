"""The run on machines that Ray has."""
