"""The proposing loop: asks for candidates, has them evaluated in workers, keeps what they came to."""
