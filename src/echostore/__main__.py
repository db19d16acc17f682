"""`python -m echostore` is the command `echostore`."""

from echostore.cli import main

if __name__ == "__main__":
    main()
