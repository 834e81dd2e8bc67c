# SPDX-License-Identifier: Apache-2.0
"""`python -m appliance`: the same as the `moorage` command."""

from appliance.cli import main

if __name__ == "__main__":
    main()
