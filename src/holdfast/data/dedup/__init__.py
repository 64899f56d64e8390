"""Finding copies: signatures of pictures, a search by Hamming distance, leaks between sets."""
