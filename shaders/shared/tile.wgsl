// Hands each cell of a finished tile to the kernel's store_cell(row, col, place, value), where place is
// row_place(row) + col_place(col): what a row or column costs to find is paid once for it.
fn store_tile(row0: u32, col0: u32, thread: u32) {
    for (var g = 0u; g < ROW_GROUPS; g++) {
        let row = row0 + first_row(thread) + 4u * g;
        let place = vec4(row_place(row), row_place(row + 1u), row_place(row + 2u), row_place(row + 3u));
        for (var c = 0u; c < COLS; c++) {
            let col = col0 + nth_col(thread, c);
            let places = place + vec4(col_place(col));
            let value = sums[c * ROW_GROUPS + g];
            store_cell(row, col, places.x, value.x);
            store_cell(row + 1u, col, places.y, value.y);
            store_cell(row + 2u, col, places.z, value.z);
            store_cell(row + 3u, col, places.w, value.w);
        }
    }
}
